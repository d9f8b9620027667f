//! What is true in a story: who is where, who has what, what is whole. What cannot happen is refused, so that the stories are coherent.

use std::collections::{HashMap, HashSet};

use crate::teller::Id;

/// Where a thing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In somebody's hands or bag.
    With(Id),
    /// At a place.
    At(Id),
}

/// Why something cannot happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Impossible(pub String);

impl std::fmt::Display for Impossible {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Impossible {}

/// The state of a story's world.
///
/// ```
/// use story_generator::World;
///
/// let (tom, mia, ball, park, barn) = (0, 1, 2, 3, 4);
/// let mut world = World::default();
/// world.go(tom, park);
/// world.go(mia, barn);
/// world.put(ball, park);
/// world.take(tom, ball)?;
/// assert!(world.give(tom, mia, ball).is_err(), "she is elsewhere");
/// world.go(mia, park);
/// world.give(tom, mia, ball)?;
/// assert!(world.has(mia, ball) && !world.has(tom, ball));
/// # Ok::<(), story_generator::Impossible>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct World {
    people: HashMap<Id, Id>,
    things: HashMap<Id, Place>,
    owners: HashMap<Id, Id>,
    broken: HashSet<Id>,
}

impl World {
    /// Somebody is at a place from now on.
    pub fn go(&mut self, person: Id, place: Id) {
        self.people.insert(person, place);
    }

    /// Where somebody is.
    pub fn place_of(&self, person: Id) -> Option<Id> {
        self.people.get(&person).copied()
    }

    /// Whether two are at one place.
    pub fn are_together(&self, one: Id, other: Id) -> bool {
        self.place_of(one).is_some() && self.place_of(one) == self.place_of(other)
    }

    /// A thing is at a place from now on.
    pub fn put(&mut self, thing: Id, place: Id) {
        self.things.insert(thing, Place::At(place));
    }

    /// Whether somebody has a thing with him or her.
    pub fn has(&self, person: Id, thing: Id) -> bool {
        self.things.get(&thing) == Some(&Place::With(person))
    }

    /// Whose a thing is.
    pub fn owner_of(&self, thing: Id) -> Option<Id> {
        self.owners.get(&thing).copied()
    }

    /// A thing is somebody's from now on, who has it.
    pub fn own(&mut self, person: Id, thing: Id) {
        self.owners.insert(thing, person);
        self.things.insert(thing, Place::With(person));
    }

    /// Somebody takes up what lies where he or she is.
    ///
    /// # Errors
    /// When it is elsewhere, or another one has it.
    pub fn take(&mut self, person: Id, thing: Id) -> Result<(), Impossible> {
        match (self.things.get(&thing), self.place_of(person)) {
            (Some(Place::At(place)), Some(here)) if *place == here => {
                self.things.insert(thing, Place::With(person));
                Ok(())
            }
            (found, here) => {
                Err(Impossible(format!("{person} at {here:?} takes {thing}, which is {found:?}")))
            }
        }
    }

    /// Somebody leaves a thing where he or she is.
    ///
    /// # Errors
    /// When he or she does not have it.
    pub fn leave(&mut self, person: Id, thing: Id) -> Result<(), Impossible> {
        match (self.has(person, thing), self.place_of(person)) {
            (true, Some(here)) => {
                self.things.insert(thing, Place::At(here));
                Ok(())
            }
            (_, here) => Err(Impossible(format!("{person} at {here:?} leaves {thing}, and has it not"))),
        }
    }

    /// Somebody hands a thing to another one; it belongs to whom it did.
    ///
    /// # Errors
    /// When they are not together, or the first does not have it.
    pub fn hand(&mut self, from: Id, to: Id, thing: Id) -> Result<(), Impossible> {
        if !self.are_together(from, to) {
            return Err(Impossible(format!("{from} hands {thing} to {to}, who is elsewhere")));
        }
        if !self.has(from, thing) {
            return Err(Impossible(format!("{from} hands {thing}, and has it not")));
        }
        self.things.insert(thing, Place::With(to));
        Ok(())
    }

    /// The same, and it is the other's.
    ///
    /// # Errors
    /// As [`World::hand`].
    pub fn give(&mut self, from: Id, to: Id, thing: Id) -> Result<(), Impossible> {
        self.hand(from, to, thing)?;
        self.owners.insert(thing, to);
        Ok(())
    }

    /// A thing breaks.
    ///
    /// # Errors
    /// When it is broken.
    pub fn break_it(&mut self, thing: Id) -> Result<(), Impossible> {
        match self.broken.insert(thing) {
            true => Ok(()),
            false => Err(Impossible(format!("{thing} breaks twice"))),
        }
    }

    /// A thing is whole again.
    ///
    /// # Errors
    /// When it was not broken.
    pub fn mend(&mut self, thing: Id) -> Result<(), Impossible> {
        match self.broken.remove(&thing) {
            true => Ok(()),
            false => Err(Impossible(format!("{thing} is mended, and was whole"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_has_what_is_elsewhere() {
        let (tom, mia, ball, park, barn) = (0, 1, 2, 3, 4);
        let mut world = World::default();
        world.go(tom, park);
        world.go(mia, barn);
        world.put(ball, barn);
        assert!(world.take(tom, ball).is_err());
        world.take(mia, ball).unwrap();
        assert!(world.take(mia, ball).is_err(), "she has it");
        world.go(mia, park);
        world.hand(mia, tom, ball).unwrap();
        assert!(world.leave(mia, ball).is_err());
        world.leave(tom, ball).unwrap();
        assert!(!world.has(tom, ball) && world.take(mia, ball).is_ok());
    }

    #[test]
    fn a_thing_lent_stays_its_owners_and_one_given_does_not() {
        let (tom, mia, ball, park) = (0, 1, 2, 3);
        let mut world = World::default();
        world.go(tom, park);
        world.go(mia, park);
        world.own(tom, ball);
        world.hand(tom, mia, ball).unwrap();
        assert_eq!(world.owner_of(ball), Some(tom));
        world.give(mia, tom, ball).unwrap();
        world.give(tom, mia, ball).unwrap();
        assert_eq!(world.owner_of(ball), Some(mia));
        assert!(world.mend(ball).is_err());
        world.break_it(ball).unwrap();
        assert!(world.break_it(ball).is_err() && world.mend(ball).is_ok());
    }
}
