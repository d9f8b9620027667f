//! HTTP server: connections, limits, access control, routing and shutdown.

mod accept;
mod access;
mod activations;
mod body;
mod body_memory;
mod complete;
mod connection;
mod content_length;
mod keys;
mod listener;
mod peer;
pub(crate) mod receive;
mod record;
mod reply;
mod routes;
mod run;
mod shared;
mod slots;
mod timed_stream;

pub(crate) use listener::Listener;
pub(crate) use run::run;
pub(crate) use shared::Shared;
use shared::{Caller, Connection, Phase};
