//! Data sets, training, evaluation and reports for Resolvent.
