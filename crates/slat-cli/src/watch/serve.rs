//! A server of one page over HTTP, `/metrics`, on a thread of its own.
//!
//! It takes one request after the other. Each has a limit of size and of time, so that nobody who
//! is slow keeps others waiting for long.

use super::exposition;
use anyhow::Context;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes of a request's head.
const MOST: usize = 8 << 10;

/// Longest time for a request, and again for its answer.
const LONGEST: Duration = Duration::from_secs(2);

/// The server, until the program ends.
#[derive(Debug)]
pub struct Server {
    text: Arc<Mutex<String>>,
    address: SocketAddr,
}

impl Server {
    /// Listens at an address. Until the first [`Server::show`], the page has no sample.
    ///
    /// # Errors
    /// The address cannot be listened at.
    pub fn listen(address: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address)
            .with_context(|| format!("--listen: cannot listen at {address}"))?;
        let address = listener.local_addr()?;
        let text = Arc::new(Mutex::new("# EOF\n".to_owned()));
        let shown = Arc::clone(&text);
        std::thread::Builder::new().name("metrics".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                match stream {
                    // A client that went away is no matter of the watch.
                    Ok(stream) => drop(answer(stream, &shown, LONGEST)),
                    // Without a descriptor to spare: later, perhaps.
                    Err(_) => std::thread::sleep(Duration::from_millis(100)),
                }
            }
        })?;
        Ok(Self { text, address })
    }

    /// Returns the address, whose port is known now if 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Puts a text in the place of the last one.
    pub fn show(&self, text: String) {
        *self.text.lock().unwrap_or_else(PoisonError::into_inner) = text;
    }
}

/// Answers a request.
fn answer(mut stream: TcpStream, text: &Mutex<String>, longest: Duration) -> std::io::Result<()> {
    let (status, content) = match request(&mut stream, Instant::now() + longest)? {
        Ok(()) => ("200 OK", text.lock().unwrap_or_else(PoisonError::into_inner).clone()),
        Err(status) => (status, format!("{status}; there is GET /metrics\n")),
    };
    let content_type = if status == "200 OK" { exposition::TYPE } else { "text/plain" };
    let allow = if status.starts_with("405") { "Allow: GET\r\n" } else { "" };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n{allow}\
         Connection: close\r\n\r\n",
        content.len()
    );
    let end = Instant::now() + longest;
    let mut left = (head + &content).into_bytes();
    while !left.is_empty() {
        stream.set_write_timeout(Some(until(end)?))?;
        let written = stream.write(&left)?;
        left.drain(..written);
    }
    stream.shutdown(std::net::Shutdown::Write)
}

/// Reads the head of a request; returns the status of an answer that is no page.
fn request(stream: &mut TcpStream, end: Instant) -> std::io::Result<Result<(), &'static str>> {
    let mut head = Vec::new();
    let mut bytes = [0; 1024];
    while !head.windows(4).any(|it| it == b"\r\n\r\n") {
        if head.len() > MOST {
            return Ok(Err("431 Request Header Fields Too Large"));
        }
        let Ok(left) = until(end) else { return Ok(Err("408 Request Timeout")) };
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(Err("400 Bad Request")),
            Ok(count) => head.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok(Err("408 Request Timeout"));
            }
            Err(error) => return Err(error),
        }
    }
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let words: Vec<&str> = line.split(' ').collect();
    Ok(match words[..] {
        [method, path, version] if version.starts_with("HTTP/1.") => {
            match (method, path.split('?').next()) {
                ("GET", Some("/metrics")) => Ok(()),
                ("GET", _) => Err("404 Not Found"),
                _ => Err("405 Method Not Allowed"),
            }
        }
        _ => Err("400 Bad Request"),
    })
}

/// Returns the time that is left.
fn until(end: Instant) -> std::io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(server: &Server, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        // The server may answer before it has read all of a request that is too long.
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    #[test]
    fn the_server_has_one_page_and_a_status_for_each_other_request() {
        let server = Server::listen(([127, 0, 0, 1], 0).into()).unwrap();
        server.show("x 1\n# EOF\n".to_owned());
        let page = asked(&server, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
        let (head, content) = page.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("openmetrics-text"));
        assert!(head.contains("Content-Length: 10\r\n"), "{head}");
        assert_eq!(content, "x 1\n# EOF\n");
        for (request, status) in [
            (&b"GET /metrics?x=1 HTTP/1.0\r\n\r\n"[..], "200"),
            (b"GET / HTTP/1.1\r\n\r\n", "404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"GET /metrics\r\n\r\n", "400"),
            (b"\xff\xfe\r\n\r\n", "400"),
            (b"GET /metrics SPDY/1.1\r\n\r\n", "400"),
        ] {
            let page = asked(&server, request);
            assert!(page.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {page}");
        }
        let long = [b"GET /metrics HTTP/1.1\r\nX: ".to_vec(), vec![b'x'; MOST]].concat();
        assert!(asked(&server, &long).starts_with("HTTP/1.1 431 "));
        let taken = Server::listen(server.address()).unwrap_err();
        assert!(format!("{taken:#}").contains("--listen: cannot listen at 127.0.0.1:"));
    }

    #[test]
    fn a_client_that_sends_no_request_is_sent_away() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.write_all(b"GET /metrics").unwrap();
        let text = Mutex::new(String::new());
        let (stream, _) = listener.accept().unwrap();
        answer(stream, &text, Duration::from_millis(20)).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    }
}
