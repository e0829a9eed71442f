"""Sites that train by themselves and exchange weights: lockstep inside each, the protocol of `control/rounds` between them."""
