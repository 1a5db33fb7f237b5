"""What goes into a bundle beside the weights: image archives, the chart, documents, other files."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from appliance.errors import UsageError
from appliance.weights.images import images_in, save_image
from appliance.weights.names import check_paths

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_FIELD = re.compile(rb"^(name|version): *[\"']?([^\s\"'#]+)", re.MULTILINE)
_CHART_FILE = re.compile(r"[^/]+/Chart\.yaml")
MAX_CHART_FILE_BYTES = 1 << 20


@dataclass
class Beside:
    """`files`: name in the bundle -> file here; `images`: name -> digest; `chart`: its version."""

    files: dict[str, Path] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    chart: str | None = None

    @property
    def missing(self) -> list[str]:
        """What a closed network needs as well and would not get from this bundle."""
        there = {name.partition("/")[0] for name in self.files}
        wanted = {"images": "--image NAME", "chart": "--chart DIR", "docs": "--docs DIR"}
        return [f"{kind} ({how})" for kind, how in wanted.items() if kind not in there]


def collect(
    *,
    images: Sequence[str] = (),
    chart: Path | None = None,
    docs: Sequence[Path] = (),
    others: Sequence[Path] = (),
    saved: Path,
    environment: Mapping[str, str],
) -> Beside:
    """All of it, looked into; `saved` is where Docker's archives wait, `environment` Docker's.

    An image is an archive's file, the name of one that Docker has here, or `NAME@sha256:DIGEST`:
    then its digest alone is noted. Raises UsageError for what is not what it should be.
    """
    beside = Beside()
    for image in images:
        _add_image(beside, image, saved, environment)
    if chart is not None:
        beside.chart = chart_version(chart)
        beside.files |= files_under(chart, "chart/")
    for path in docs:
        beside.files |= files_under(path, "docs/")
    for path in others:
        beside.files |= files_under(path, "")
    check_paths(beside.files)
    return beside


def files_under(path: Path, prefix: str) -> dict[str, Path]:
    """A file, or a folder with all it holds, under names that begin with the path's own."""
    inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    start = path.absolute().parent
    return {f"{prefix}{file.absolute().relative_to(start).as_posix()}": file for file in inside}


def chart_version(chart: Path) -> str:
    """`NAME VERSION` of a chart, a folder or a packed one. Raises UsageError if it is none."""
    try:
        if chart.is_dir():
            text = (chart / "Chart.yaml").read_bytes()
        else:
            with tarfile.open(chart) as tar:
                name = next(n for n in tar.getnames() if _CHART_FILE.fullmatch(n))
                stream = tar.extractfile(name)
                text = b"" if stream is None else stream.read(MAX_CHART_FILE_BYTES)
    except (OSError, tarfile.TarError, StopIteration) as error:
        raise UsageError(
            f"{chart} is no chart: there is no Chart.yaml in it", fix="--chart helm, or a .tgz"
        ) from error
    found = {key.decode(): value.decode("utf-8", "replace") for key, value in _FIELD.findall(text)}
    if not {"name", "version"} <= found.keys():
        raise UsageError(f"the Chart.yaml of {chart} has no name or no version")
    return f"{found['name']} {found['version']}"


def _add_image(beside: Beside, text: str, saved: Path, environment: Mapping[str, str]) -> None:
    name, separator, digest = text.partition("@")
    if separator:
        if not name or not _DIGEST.fullmatch(digest):
            raise UsageError(f"{text!a} is not NAME@sha256:DIGEST")
        beside.images[name] = digest
        return
    archive = Path(text)
    if not archive.is_file():
        archive = save_image(text, saved, environment)
    found = images_in(archive)
    both = found.keys() & beside.images.keys()
    if both:
        raise UsageError(f"the image {min(both)} is given twice")
    beside.images |= found
    beside.files[f"images/{archive.name}"] = archive
