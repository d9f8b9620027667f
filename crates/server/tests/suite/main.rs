//! The server from outside, over sockets.

mod api_errors;
mod clients;
mod common;
mod grammar;
mod limits;
mod page;
mod same_bytes;
mod security;
mod shutdown;
mod wire;
