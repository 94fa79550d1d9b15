"Packaging: everything comes from settings.ini, so that nbdev and pip read the same facts."

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

cfg = ConfigParser(delimiters=["="], interpolation=None)
cfg.read("settings.ini", encoding="utf-8")
cfg = cfg["DEFAULT"]
DATA = ["tiny-llama", "tasks", "pass_rates", "recipes"]
extras = {
    k.removesuffix("_requirements"): cfg[k].split() for k in cfg if k.endswith("_requirements")
}


class BuildWithData(build_py):
    "A wheel holds the repository's data/ as grpo_nb/data; an editable install reads it where it is."

    def run(self):
        super().run()
        for folder in () if self.editable_mode else DATA:
            self.copy_tree(f"data/{folder}", f"{self.build_lib}/{cfg['lib_name']}/data/{folder}")


setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords=cfg["keywords"].split(),
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Natural Language :: English",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
    cmdclass={"build_py": BuildWithData},
    packages=find_packages(include=["grpo_nb", "grpo_nb.*"]),
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "verl.plugins": ["grpo_nb=grpo_nb.integrations.verl"],
        "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"],
    },
    zip_safe=False,
)
