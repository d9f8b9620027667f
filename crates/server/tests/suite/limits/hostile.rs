//! What no client should send.
