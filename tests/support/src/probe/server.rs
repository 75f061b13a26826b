//! Servers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;

/// Serves TCP and UDP on `address` forever.
///
/// A TCP client first receives its own address as seen here, in one line; then every byte is echoed. A UDP datagram is
/// echoed after a line with the sender's address. Answers are sent from the address that the client addressed.
///
/// # Errors
/// A socket cannot be bound.
pub fn serve(address: SocketAddr) -> anyhow::Result<()> {
    let tcp = TcpListener::bind(address)?;
    let udp = UdpSocket::bind(address)?;
    println!("ready {address}");
    thread::spawn(move || {
        let mut buffer = [0_u8; 65_535];
        while let Ok((length, peer)) = udp.recv_from(&mut buffer) {
            let mut answer = format!("{peer}\n").into_bytes();
            answer.extend_from_slice(buffer.get(..length).unwrap_or_default());
            // The loss of a peer must not stop the service for others.
            let _ = udp.send_to(&answer, peer);
        }
    });
    for stream in tcp.incoming() {
        let Ok(stream) = stream else { continue };
        thread::spawn(move || {
            let _ = echo(stream);
        });
    }
    Ok(())
}

fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let peer = stream.peer_addr()?;
    stream.write_all(format!("{peer}\n").as_bytes())?;
    let mut buffer = [0_u8; 65_536];
    loop {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            return Ok(());
        }
        stream.write_all(buffer.get(..length).unwrap_or_default())?;
    }
}
