"""Files, folders and data sets as rows."""
