"""Two packages from two folders: `rayllm/`, and `kernels/` under the name `rayllm_kernels`."""

from setuptools import find_packages, setup

kernels = ["rayllm_kernels", *(f"rayllm_kernels.{name}" for name in find_packages("kernels"))]
setup(
    packages=[*find_packages(include=["rayllm", "rayllm.*"]), *kernels],
    package_dir={"rayllm": "rayllm", "rayllm_kernels": "kernels"},
    package_data={"rayllm": ["py.typed", "grpc/rayllm.proto"], "rayllm_kernels": ["*.cpp", "*.h", "*/*.cpp", "*/*.h"]},
)
