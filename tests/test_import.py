# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
import importlib.resources
import subprocess
import sys

import pytest

import dlite_hf


def test_import_loads_nothing_of_training():
    code = "import sys, dlite_hf; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "dlite_hf.modeling_dlite" in loaded
    assert not {"transformers.trainer", "datasets", "peft", "matplotlib"} & set(loaded)


@pytest.mark.parametrize("name", dlite_hf.__all__)
def test_public_names(name):
    assert getattr(dlite_hf, name).__name__ == name


def test_unknown_name():
    with pytest.raises(AttributeError, match="'dlite_hf' has no attribute 'DLiteTeacher'"):
        _ = dlite_hf.DLiteTeacher


def test_package_is_typed():
    assert importlib.resources.files("dlite_hf").joinpath("py.typed").is_file()
