"""Reports and studies as pages (plotly) and as image files (matplotlib), with one set of colours."""

#: Distinguishable with colour blindness, on white and on black (Okabe and Ito, extended).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f6fc9")
GREY = "#9a9a9a"  # all further series, and reference lines
SHADE = "#dbe9f6"  # a marked range behind the data
