//! Serves a model from another program: starts a server, sends one request and stops it.
//!
//! Run it with `cargo run -p candle-gpt2-server --example ask_once`.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;

use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_server::{Server, ServerOptions};

const BODY: &str = r#"{"prompt": "One day", "max_tokens": 20, "seed": 7}"#;

fn main() -> Result<(), Box<dyn Error>> {
    let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
    let mut options = ServerOptions { port: 0, ..ServerOptions::default() }; // any free port
    options.api.name = "built-in".into();
    let server = Server::bind(model, options)?;
    let (address, handle) = (server.address(), server.handle());
    println!("serving on {address}");
    let serving = thread::spawn(|| server.run());

    // Plain HTTP request, as any client could send.
    let host = address.trim_start_matches("http://");
    let mut connection = TcpStream::connect(host)?;
    write!(
        connection,
        "POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{BODY}",
        BODY.len()
    )?;
    let mut response = String::new();
    connection.read_to_string(&mut response)?;
    println!("{response}");

    handle.stop();
    serving.join().map_err(|_| "the server panicked")??;
    println!("stopped");
    Ok(())
}
