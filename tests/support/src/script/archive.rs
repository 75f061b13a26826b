//! The file format: a text, then files, each after a line `-- NAME --` (txtar).

use std::collections::BTreeMap;

/// A script's text and the files that come with it.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Archive {
    /// The text before the first file.
    pub(super) comment: String,
    /// Content by name.
    pub(super) files: BTreeMap<String, String>,
}

impl Archive {
    /// Every text is a valid archive; one without marker lines has no files.
    pub(super) fn parse(text: &str) -> Self {
        let mut archive = Self::default();
        let mut current: Option<String> = None;
        for line in text.split_inclusive('\n') {
            if let Some(name) = marker(line) {
                archive.files.insert(name.to_owned(), String::new());
                current = Some(name.to_owned());
                continue;
            }
            match current.as_ref().and_then(|name| archive.files.get_mut(name)) {
                Some(content) => content.push_str(line),
                None => archive.comment.push_str(line),
            }
        }
        archive
    }
}

fn marker(line: &str) -> Option<&str> {
    let name = line.trim_end().strip_prefix("-- ")?.strip_suffix(" --")?.trim();
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_then_files() {
        let archive = Archive::parse("do this\n-- a.yaml --\nx: 1\n--not a marker--\n-- b --\n");
        assert_eq!(archive.comment, "do this\n");
        let wanted = [("a.yaml", "x: 1\n--not a marker--\n"), ("b", "")];
        assert_eq!(archive.files, wanted.map(|(name, text)| (name.to_owned(), text.to_owned())).into());
        assert_eq!(Archive::parse("").files.len(), 0);
    }
}
