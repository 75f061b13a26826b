//! Parsing of script lines: marks, words, redirection.

/// The expected result of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// `!`: it must fail.
    Fail,
    /// `*`: if it fails, its paragraph is repeated a little later.
    Retry,
}

/// A command.
#[derive(Debug, PartialEq)]
pub(super) struct Line {
    /// Counted from 1.
    pub(super) number: usize,
    /// Number of the paragraph; lines without a gap between them have the same one.
    pub(super) paragraph: usize,
    /// As written.
    pub(super) text: String,
    marks: Vec<Mark>,
    /// The command and its arguments, braces expanded.
    pub(super) words: Vec<String>,
    /// The file for the command's output.
    pub(super) redirect: Option<String>,
}

impl Line {
    pub(super) fn has(&self, mark: Mark) -> bool {
        self.marks.contains(&mark)
    }
}

/// Parses a script. Empty lines and comments separate paragraphs.
///
/// # Errors
/// The invalid line, and the reason.
pub(super) fn parse(script: &str) -> Result<Vec<Line>, String> {
    let mut lines = Vec::new();
    let mut paragraph = 0;
    for (index, text) in script.lines().enumerate() {
        let number = index + 1;
        let text = text.trim();
        if text.is_empty() || text.starts_with('#') {
            paragraph += 1;
            continue;
        }
        let mut marks = Vec::new();
        let mut rest = text;
        loop {
            let mark = match rest.chars().next() {
                Some('!') => Mark::Fail,
                Some('*') => Mark::Retry,
                _ => break,
            };
            marks.push(mark);
            rest = rest.get(1..).unwrap_or_default().trim_start();
        }
        let mut words = Vec::new();
        for Word { text, quoted } in words_of(rest).map_err(|problem| format!("line {number}: {problem}"))? {
            if quoted {
                words.push(text);
            } else {
                words.extend(expand(&text));
            }
        }
        let redirect = match words.iter().position(|word| word == ">") {
            None => None,
            Some(at) if at + 2 == words.len() => {
                let file = words.pop();
                words.truncate(at);
                file
            }
            Some(_) => return Err(format!("line {number}: expected one file name after >")),
        };
        if words.is_empty() {
            return Err(format!("line {number}: expected a command"));
        }
        lines.push(Line { number, paragraph, text: text.to_owned(), marks, words, redirect });
    }
    Ok(lines)
}

/// The number of seeds requested by the script: `# rounds: N`, else one.
///
/// # Errors
/// N is not a number.
pub(super) fn rounds(script: &str) -> Result<u64, String> {
    asked(script, "rounds")
        .map_or(Ok(1), |text| text.parse().map_err(|_| format!("# rounds:{text}: expected a number")))
}

/// A directive of a script: the text after `# KEY:`.
pub(super) fn asked<'a>(script: &'a str, key: &str) -> Option<&'a str> {
    script.lines().find_map(|line| line.trim().strip_prefix("# ")?.strip_prefix(key)?.strip_prefix(':')).map(str::trim)
}

struct Word {
    text: String,
    quoted: bool,
}

/// Splits at blanks; text in single quotes is one word.
fn words_of(text: &str) -> Result<Vec<Word>, String> {
    let mut words: Vec<Word> = Vec::new();
    let (mut inside, mut open) = (false, false);
    for c in text.chars() {
        match c {
            '\'' => {
                if !inside {
                    words.push(Word { text: String::new(), quoted: true });
                }
                inside = true;
                open = !open;
                if let Some(word) = words.last_mut() {
                    word.quoted = true;
                }
            }
            c if c.is_whitespace() && !open => inside = false,
            c => {
                if !inside {
                    words.push(Word { text: String::new(), quoted: false });
                }
                inside = true;
                if let Some(word) = words.last_mut() {
                    word.text.push(c);
                }
            }
        }
    }
    if open { Err("a quote is not closed".to_owned()) } else { Ok(words) }
}

/// `n{1..3}` expands to `n1 n2 n3`; a word without such braces to itself.
fn expand(word: &str) -> Vec<String> {
    let parts = word.split_once('{').and_then(|(before, rest)| {
        let (range, after) = rest.split_once('}')?;
        let (first, last) = range.split_once("..")?;
        Some((before, first.parse::<u32>().ok()?, last.parse::<u32>().ok()?, after))
    });
    match parts {
        Some((before, first, last, after)) => (first..=last).map(|number| format!("{before}{number}{after}")).collect(),
        None => vec![word.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        parse(line).unwrap().remove(0).words
    }

    #[test]
    fn words_quotes_and_braces() {
        assert_eq!(words("a  b\tc"), ["a", "b", "c"]);
        assert_eq!(words("k '{\"a\": [1, 2]}' ''"), ["k", "{\"a\": [1, 2]}", ""]);
        assert_eq!(words("add n{9..11} '{1..2}'"), ["add", "n9", "n10", "n11", "{1..2}"]);
        assert!(parse("a 'b").is_err());
        assert!(parse("a > b c").is_err());
        assert!(parse("!").is_err());
    }

    #[test]
    fn marks_paragraphs_and_redirection() {
        let lines = parse("# why\nfirst > out\n* ! second\n\nthird\n").unwrap();
        let [first, second, third] = lines.as_slice() else { panic!("{lines:?}") };
        assert_eq!(first.redirect.as_deref(), Some("out"));
        assert_eq!(first.words, ["first"]);
        assert!(second.has(Mark::Fail) && second.has(Mark::Retry) && !first.has(Mark::Retry));
        assert_eq!((first.number, second.number, third.number), (2, 3, 5));
        assert!(first.paragraph == second.paragraph && second.paragraph != third.paragraph);
    }

    #[test]
    fn rounds_are_asked_for_in_a_comment() {
        assert_eq!(rounds("# case\n# rounds: 12\n"), Ok(12));
        assert_eq!(rounds("x\n"), Ok(1));
        assert!(rounds("# rounds: many\n").is_err());
    }
}
