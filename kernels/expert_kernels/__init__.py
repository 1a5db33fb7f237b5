"""Operations on EXL3 experts that stay where they are. Importing this package is free."""
