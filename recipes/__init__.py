"""Named recipes, one YAML file each."""
