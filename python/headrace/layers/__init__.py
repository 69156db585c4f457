"""Building blocks of a decoder: linear, norm, rotary embedding."""
