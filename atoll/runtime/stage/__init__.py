"""What one rank of a distributed run computes: a stage cut from the captured program, with the parts of its parameters the rank holds."""
