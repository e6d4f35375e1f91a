"""Packages import their modules when a name is used, and commands import only what they need."""

import pkgutil

import pytest

import toolkit

PACKAGES = [
    info.name
    for info in pkgutil.iter_modules(toolkit.__path__, "toolkit.")
    if info.ispkg and hasattr(__import__(info.name, fromlist=["_"]), "__getattr__")
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists_and_no_module_has_it(package):
    module = __import__(package, fromlist=["_"])
    modules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    exported = {name for name in module.__dir__() if name not in vars(module)}
    for name in exported:
        value = getattr(module, name)
        # An imported module takes its own name in the package, also from another name's import.
        assert name not in modules or hasattr(value, "__path__") or hasattr(value, "__file__")


@pytest.mark.parametrize("name", ["nothing"])
def test_an_unknown_name_is_an_attribute_error(name):
    from toolkit import export

    with pytest.raises(AttributeError, match=r"'toolkit\.export' has no attribute 'nothing'"):
        getattr(export, name)
