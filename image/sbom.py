"""Write what is installed here as a CycloneDX 1.6 list of components: `python sbom.py FILE`."""

from __future__ import annotations

import json
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path


def component(found: Distribution) -> dict[str, object]:
    name, version = found.metadata["Name"], found.version
    one: dict[str, object] = {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{version}",
    }
    licence = found.metadata.get("License-Expression") or found.metadata.get("License")
    if licence and len(licence) < 100:
        one["licenses"] = [{"license": {"name": licence}}]
    return one


def main(path: Path) -> None:
    components = sorted(map(component, distributions()), key=lambda one: str(one["purl"]))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": components,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
