"""torch's own table of operator samples, run through the transforms and compared with a loop over examples."""
