//! The sandbox container of a pod: waits forever. Compiled statically for its own image.

fn main() {
    loop {
        std::thread::park();
    }
}
