"""What must hold: each invariant is a function of a history."""
