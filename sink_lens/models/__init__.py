"""Language models: loading, families, sites and the checks at load."""
