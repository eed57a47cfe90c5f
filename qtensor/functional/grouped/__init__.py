"""Forward and backward of linear layers over groups of rows."""
