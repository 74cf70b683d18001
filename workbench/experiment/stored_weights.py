"""What the page of a bundle and the text of `validate` say where gate `weights` is RED: their
figures are relative to the stored weights, and cannot show that these are wrong."""

from workbench.check.cost import COLUMNS

IN_A_CELL = (
    "The error and the rounding budget of a cell both contain this fault. These cells "
    "compare the program with the stored weights, and cannot show a fault of the weights."
)
"""What an error over its rounding budget says of wrong weights."""
COLUMNS_OF_WRONG = COLUMNS.replace(
    "the cost of compression", "the cost of the stored weights, which are wrong"
)
"""What the columns of the cost are, in words, where the stored weights are wrong."""
