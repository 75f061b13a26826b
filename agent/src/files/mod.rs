//! Watches a file that another program writes.
//!
//! The directory is watched, not the file: a mounted ConfigMap is updated by swapping a symbolic link beside it.
//! Because a directory can be created or removed, or be on a file system without events, the file is also polled every
//! [`POLL`].

use crate::tables::Table;
use crate::tables::rows::FileContent;
use notify::{RecursiveMode, Watcher};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Events within this time after the first are handled as one change, so that a half-written file is rarely read.
pub const DEBOUNCE: Duration = Duration::from_millis(200);

/// Polling interval in the absence of events.
pub const POLL: Duration = Duration::from_secs(30);

/// Larger files are not read.
const LARGEST: u64 = 4 << 20;

/// Reads the file now.
#[must_use]
pub fn read(path: &Path) -> FileContent {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.len() > LARGEST => {
            return FileContent::Unreadable(format!("{} bytes; at most {LARGEST} are read", metadata.len()));
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return FileContent::Absent,
        Err(error) => return FileContent::Unreadable(error.to_string()),
    }
    match std::fs::read(path) {
        Ok(bytes) => FileContent::Bytes(bytes),
        Err(error) if error.kind() == ErrorKind::NotFound => FileContent::Absent,
        Err(error) => FileContent::Unreadable(error.to_string()),
    }
}

/// Publishes the content of `path` at once and after each change, until dropped.
pub async fn follow(path: PathBuf, table: Arc<Table<(), FileContent>>) {
    let (events, mut changes) = mpsc::channel::<()>(1);
    let directory = path.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf);
    let mut watcher: Option<notify::RecommendedWatcher> = None;
    loop {
        // Watch before reading, so that no change is missed.
        if watcher.is_none() {
            watcher = watch(&directory, events.clone());
        }
        table.publish(BTreeMap::from([((), read(&path))]));
        if let Ok(Some(())) = tokio::time::timeout(POLL, changes.recv()).await {
            tokio::time::sleep(DEBOUNCE).await;
            while changes.try_recv().is_ok() {}
        }
        if !directory.exists() {
            watcher = None;
        }
    }
}

fn watch(directory: &Path, events: mpsc::Sender<()>) -> Option<notify::RecommendedWatcher> {
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading the file causes access events; only modifications count.
        if event.is_ok_and(|event| !event.kind.is_access()) {
            // A full channel already signals a change.
            let _ = events.try_send(());
        }
    })
    .ok()?;
    watcher.watch(directory, RecursiveMode::NonRecursive).ok()?;
    Some(watcher)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn next(reader: &mut crate::tables::Reader<(), FileContent>) -> FileContent {
        tokio::time::timeout(Duration::from_secs(20), reader.changed()).await.unwrap();
        reader.snapshot().rows[&()].clone()
    }

    #[tokio::test]
    async fn creation_replacement_by_link_and_removal_are_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ip-masq-agent");
        let table = Arc::new(Table::new("file"));
        let mut reader = table.reader();
        let task = tokio::spawn(follow(path.clone(), Arc::clone(&table)));
        assert_eq!(next(&mut reader).await, FileContent::Absent);

        // As kubelet does it: a directory per version, and a link that is swapped by rename.
        std::fs::create_dir(dir.path().join("..v1")).unwrap();
        std::fs::write(dir.path().join("..v1/ip-masq-agent"), "one").unwrap();
        std::os::unix::fs::symlink("..v1/ip-masq-agent", &path).unwrap();
        assert_eq!(next(&mut reader).await, FileContent::Bytes(b"one".to_vec()));

        std::fs::write(dir.path().join("next"), "two").unwrap();
        std::fs::rename(dir.path().join("next"), &path).unwrap();
        assert_eq!(next(&mut reader).await, FileContent::Bytes(b"two".to_vec()));

        std::fs::remove_file(&path).unwrap();
        assert_eq!(next(&mut reader).await, FileContent::Absent);
        task.abort();
    }

    #[test]
    fn a_directory_instead_of_the_file_is_unreadable() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(read(dir.path()), FileContent::Unreadable(_)));
        assert_eq!(read(&dir.path().join("none")), FileContent::Absent);
    }
}
