"""Configs of other tools as configs of the toolkit. Imports no torch."""

from toolkit.convert.converter import Conversion, convert_config
