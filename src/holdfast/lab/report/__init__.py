"""Reports of searches: the matrix, and traces as text, and drawn in the terminal, as SVG and as HTML."""
