//! HTTP: connections, their limits, who may ask, what answers, and the end.

mod accept;
mod activations;
mod body;
mod complete;
mod connection;
mod content_length;
mod gate;
mod guarded;
mod keys;
mod listener;
mod peer;
pub(crate) mod receive;
mod record;
mod reply;
mod rooms;
mod routes;
mod run;
mod seats;
mod shared;

pub(crate) use listener::Listener;
pub(crate) use run::run;
pub(crate) use shared::Shared;
use shared::{Caller, Connection, Phase};
