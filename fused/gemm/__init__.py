"""GEMMs of two MXFP8 operands."""
