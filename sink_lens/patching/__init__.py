"""Activation, path and attribution patching: values of one run put into another."""
