//! Suggestions after a misspelling.

/// The known name that was most likely meant: the one with the smallest edit distance, provided that most of the name
/// is unchanged. Of equal ones the first.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = name.to_ascii_lowercase();
    let distance = |candidate: &&str| strsim::damerau_levenshtein(&lower, &candidate.to_ascii_lowercase());
    let nearest = known.into_iter().min_by_key(distance)?;
    (distance(&nearest) * 3 <= name.chars().count().max(3)).then_some(nearest)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn nearest_name_is_close() {
        let known = ["devices", "debug", "ipam"];
        assert_eq!(nearest("device", known), Some("devices"));
        assert_eq!(nearest("ipma", known), Some("ipam"));
        assert_eq!(nearest("DEBUG", known), Some("debug"));
        assert_eq!(nearest("masquerade", known), None);
        assert_eq!(nearest("", known), None);
    }
}
