"""The A/B check: does MXFP8 training move normalized entropy or calibration against BF16?"""
