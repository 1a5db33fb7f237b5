"""What nvidia-smi and other tools print, as witnesses: text -> facts. Nothing here ever raises."""
