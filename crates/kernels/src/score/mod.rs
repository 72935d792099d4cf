//! How two tokens relate.
