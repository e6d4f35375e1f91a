"""The wheel's build step: recipes and launch configurations become data of the package.

They are folders of the repository, where users of a clone read, edit and start them, and where
`toolkit.recipes` finds them in a clone.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in ("recipes", "accelerate_configs"):
                target = Path(self.build_lib, "toolkit", "shipped", folder)
                ignored = shutil.ignore_patterns("__pycache__", "demo.py")
                shutil.copytree(folder, target, ignore=ignored, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithRecipes})
