//! What holds a pod's namespaces: waits, and does nothing else. Compiled by itself, statically, for an image of its own.

fn main() {
    loop {
        std::thread::park();
    }
}
