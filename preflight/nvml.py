"""NVML as plain JSON, the only user of nvidia-ml-py: structs are dicts, handles are indices."""

from __future__ import annotations

import ctypes
from typing import Any

from preflight.answers import Unreadable

# The numbers of nvml.h that a check knows by name.
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 18
NOT_SUPPORTED = 3
FUNCTION_NOT_FOUND = 13


class Nvml:
    """Loads the library at the first call and remembers why it could not."""

    def __init__(self) -> None:
        self._library: Any = None
        self._failed: Unreadable | None = None

    def call(self, name: str, *words: str) -> Any:
        """One NVML function: words `gpuN` are handles, other words are numbers."""
        library = self._loaded()
        try:
            function = getattr(library, name)
            arguments = [self._word(library, word) for word in words]
            if name == "nvmlDeviceGetFieldValues":
                arguments = [arguments[0], arguments[1:]]
            if name == "nvmlDeviceGetGpuFabricInfo":
                # Answers into a struct of the caller's.
                info = library.c_nvmlGpuFabricInfo_t()
                function(*arguments, ctypes.byref(info))
                return {"state": int(info.state)}
            return plain(function(*arguments))
        except AttributeError:
            raise Unreadable(f"nvidia-ml-py has no {name}", FUNCTION_NOT_FOUND) from None
        except library.NVMLError as error:
            raise Unreadable(str(error), error.value) from error

    def _loaded(self) -> Any:
        if self._failed:
            raise self._failed
        if self._library is None:
            import pynvml

            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                self._failed = Unreadable(str(error), error.value)
                raise self._failed from error
            self._library = pynvml
        return self._library

    @staticmethod
    def _word(library: Any, word: str) -> Any:
        if word.startswith("gpu"):
            return library.nvmlDeviceGetHandleByIndex(int(word[3:]))
        return int(word)


def plain(found: Any) -> Any:
    """What nvidia-ml-py returned, as JSON: numbers, texts, lists and dicts."""
    if isinstance(found, bytes):
        return found.decode("utf-8", "replace")
    if isinstance(found, ctypes.Structure):
        return {name: plain(getattr(found, name)) for name, *_ in found._fields_}
    if isinstance(found, ctypes.Union):
        return plain(getattr(found, "uiVal", None))
    if isinstance(found, ctypes.Array | list | tuple):
        return [plain(item) for item in found]
    if found is None or isinstance(found, str | int | float | bool):
        return found
    names = [n for n in dir(found) if not n.startswith("_")]
    return {name: plain(getattr(found, name)) for name in names}
