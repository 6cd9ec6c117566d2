"""Functions whose lanes stay abreast: they run on plain tensors, with the lanes in dim 0, and open no plane."""
