"""Key and value pools."""
