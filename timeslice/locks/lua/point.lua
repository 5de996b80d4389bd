--[[
The ranks of a gang decide together whether to yield: who comes first to a yield point decides for all, and the others
read the same answer when they come there.
ARGV  1 floor  2 gang  3 rank  4 number of the yield point in this lease, from 1  5 shortest slice in ms
Reply ok yields (1: at this point, 0: goes on) | not_holder (this rank is not inside)
--]]
-- @include group waiters gangs
local gang, rank, number, min_slice_ms = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])

begin(true, FIELD_MAX)
local party = S.lease_id == gang and S.ending == '' and party_get(gang, rank)
if not party or party.renewed == 'left' then
  return { 'not_holder' }
end
settle_clock()
local stored = redis.call('HMGET', state_key, 'point_token', 'max_point', 'yield_at')
local fresh = tonumber(stored[1]) ~= S.token -- what is stored is of an earlier lease
local max_point = fresh and 0 or tonumber(stored[2]) or 0
local yield_at = fresh and 0 or tonumber(stored[3]) or 0
if number > max_point then
  if yield_at == 0 and now - S.granted_at_ms >= min_slice_ms and redis.call('ZCARD', queue_key) > 0
    and pause_reason() == '' then
    yield_at = number
  end
  redis.call('HSET', state_key, 'point_token', digits(S.token), 'max_point', digits(number), 'yield_at', digits(yield_at))
end
save()
return { 'ok', yield_at > 0 and number >= yield_at and 1 or 0 }
