"""Convert configs of other tools to configs of the toolkit. Imports no torch."""

from toolkit.convert.converter import Conversion, convert_config
