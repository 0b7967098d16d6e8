"""Run folders in, figures and one self-contained page out."""
