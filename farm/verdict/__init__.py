"""Sum against whole: the choice of figures for a sum, kernel audit, coverage, intervals, and the judgement."""
