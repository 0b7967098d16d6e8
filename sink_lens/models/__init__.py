"""Language models: loading, architecture families, sites, and the checks that a model passes when it is loaded."""
