//! The answering side.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;

/// Serves TCP and UDP on `address` for ever.
///
/// A TCP client is first told its own address as seen here, in one line; then every byte comes back. A UDP datagram comes
/// back behind a line with the sender's address. Both are answered by the address that was spoken to.
///
/// # Errors
/// When a socket cannot be bound.
pub fn serve(address: SocketAddr) -> anyhow::Result<()> {
    let tcp = TcpListener::bind(address)?;
    let udp = UdpSocket::bind(address)?;
    println!("ready {address}");
    thread::spawn(move || {
        let mut buffer = [0_u8; 65_535];
        while let Ok((length, peer)) = udp.recv_from(&mut buffer) {
            let mut answer = format!("{peer}\n").into_bytes();
            answer.extend_from_slice(buffer.get(..length).unwrap_or_default());
            // A peer that is gone is no reason to stop serving the others.
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
