"""Compiles the C++ kernels of kernels_patch with the package; all else stands in pyproject.toml.

Without a compiler the installation still succeeds: the extension is optional, the reason is printed
here (pip shows it with -v), and the plug-in says at start-up that the torch form serves instead.
"""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PACKAGE = Path(__file__).parent / "kernels_patch"
_spec = importlib.util.spec_from_file_location("kernels_patch_build", PACKAGE / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)


class BuildKernels(build_ext):
    """Builds a plain shared library: it has no Python in it, so no Python in its name either."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / build.LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        try:
            build.compile_library(Path(self.get_ext_fullpath(ext.name)), PACKAGE)
        except build.BuildError as error:
            raise CompileError(
                f"{error}\nWITHOUT COMPILED KERNELS the INT8 KV cache is served by the much "
                "slower torch form."
            ) from error


sources = [f"kernels_patch/{name}" for name in build.SOURCES if name.endswith(".cpp")]
setup(
    ext_modules=[Extension("kernels_patch._native", sources=sources, optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
