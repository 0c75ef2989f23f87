"""Sum against whole: which figure of a reading a sum takes, coverage, kernels, intervals, pass or fail."""
