"""What pyproject.toml cannot say: the wheel carries a library for this kind of machine, and none of CPython's own interface."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.dist import Distribution


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Binary(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"bdist_wheel": Wheel}, distclass=Binary)
