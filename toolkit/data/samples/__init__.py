"""Token ids as samples: cut, packed or padded; collated."""
