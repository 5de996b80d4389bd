--[[
A rank of a gang asks for the group, or refreshes its wait. The gang's place in the queue is taken when the last of its
ranks is there. The same rank's id always gets the same answer.
ARGV  1 floor  2 id of this rank  3 gang, or '' while it is not known  4 name of the gang  5 rank  6 how many ranks
      7 job  8 host  9 pid  10 start  11 priority  12 label  13 lease_ms  14 ttl_ms
      15 'lock' to declare the group lock-only, else ''  16 score of an earlier entry of the gang, or ''
Reply granted token how swap_ms counter mode registered deadline_ms needs_weights gang unconfirmed
      queued position score phase reason holder holder_ms counter mode registered gang   (no score: the gang forms)
      ended by why | mode <mode of the group> | full most (so many wait already)
Events LeaseGranted, WaiterQueued, GangForming, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance asking
local id, gang, name, rank, world = ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local job, host, pid, start, wanted_mode = ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[15]
local ttl_ms = tonumber(ARGV[14])

-- This rank is one of the gang. Who had asked as the same rank is over: a process that was started again.
local function arrive(old)
  if old and old.id ~= UNKNOWN then
    remember_ended(old.id)
    redis.call('HDEL', waiters_key, old.id .. '/gang')
  end
  party_set(gang, rank, { id = id, host = host, pid = pid, start = start, renewed = '-' })
  redis.call('HSET', waiters_key, id .. '/gang', gang .. ' ' .. rank)
  return old and 0 or 1
end

-- No rank's silence is noticed before its own client would renew.
local function longest_lease()
  return math.max(tonumber(ARGV[13]), tonumber(redis.call('HGET', waiters_key, gang .. '/lease_ms')) or 0)
end

-- What the round asks for, in the words of who came last; as its process counts that of the first rank.
local function record_of_all()
  local first = party_get(gang, '0') or { host = host, pid = pid, start = start }
  return {
    job = job, host = first.host, pid = first.pid, start = first.start, priority = tonumber(ARGV[11]), label = ARGV[12],
    lease_ms = longest_lease(), ttl_ms = ttl_ms, enqueued_at_ms = digits(now), world = ARGV[6], name = name,
  }
end

local function over()
  local by, why = taken_by(gang)
  local party = by == '' and why == '' and party_get(gang, rank)
  if party and party.id ~= id then
    why = party_named(gang, rank) .. ' took its place; ' .. TWO_PROGRAMS
  end
  return { 'ended', by, why }
end

begin(false, FIELD_MAX)
local place = old_place(ARGV[16])
for i = 2, 10 do
  if string.find(ARGV[i], '[%s/]') then
    return redis.error_reply('ERR argument ' .. i .. ' holds a space or a slash')
  end
end
if not is_rank(rank, ARGV[6]) then
  return redis.error_reply('ERR a rank is a number from 0 to below the number of ranks, and these are ' .. WORLD_MAX
    .. ' at most')
end
gang = string.match(redis.call('HGET', waiters_key, id .. '/gang') or '', '^(%S+) ') or gang
local ending = S.lease_id == gang and S.ending ~= ''
if (has_ended(id) or has_ended(gang)) and not ending then
  return over()
end
if wanted_mode ~= '' and S.mode ~= '' and S.mode ~= wanted_mode then
  return { 'mode', S.mode }
end
settle_clock()
if S.mode == '' and wanted_mode ~= '' then
  set('mode', wanted_mode)
end
reap()
if has_ended(id) or has_ended(gang) then
  local party = ending and party_get(gang, rank)
  if party and party.id == id then
    hear_end(gang, rank)
  end
  advance()
  save()
  return over()
end
local forming = forming_field(name, job, ARGV[6])
if gang == '' or (S.lease_id ~= gang and redis.call('HEXISTS', waiters_key, gang .. '/world') == 0) then
  gang = redis.call('HGET', waiters_key, forming) or (gang == '' and 'gang-' .. id or gang) -- a new round, or a lost one
end
local party = party_get(gang, rank)
local why = S.lease_id ~= gang and twin(forming, name, job, ARGV[6], rank, { host = host, pid = pid, start = start })
if why then
  if party and party.id == id then
    gang_end(gang, rank, why)
  end
  advance()
  save()
  return { 'ended', '', why }
end
if not party and S.lease_id ~= gang and is_too_many(gang .. '/' .. rank, place) then
  return turn_away()
end
local waits = ''
if S.lease_id == gang then
  if not party or party.id ~= id then -- it comes back after data loss
    arrive(party)
  elseif party.renewed == 'left' then
    advance()
    save()
    return over()
  end
  party_renew(gang, rank, party_get(gang, rank)) -- it asks itself, so it lives
  set('confirmed', '1')
  set('renewed_at_ms', now)
  set('deadline_ms', now + S.lease_ms)
else
  redis.call('ZADD', alive_key, now + ttl_ms, gang .. '/' .. rank, now + ttl_ms, gang)
  local arrived
  if not party or party.id ~= id then
    arrived = redis.call('HINCRBY', waiters_key, gang .. '/arrived', arrive(party))
    redis.call('HSET', waiters_key, gang .. '/lease_ms', longest_lease())
    if place then
      redis.call('HSET', waiters_key, gang .. '/score', ARGV[16])
    end
  end
  if redis.call('HEXISTS', waiters_key, gang .. '/world') == 0 then
    waiter_set(gang, record_of_all())
    redis.call('HSET', waiters_key, forming, gang)
  end
  arrived = arrived or tonumber(redis.call('HGET', waiters_key, gang .. '/arrived')) or 0
  if arrived >= world then
    gang_formed(gang, name, job, ARGV[6])
    ask(gang, record_of_all(), place or tonumber(redis.call('HGET', waiters_key, gang .. '/score')))
    if S.lease_id == gang then
      party_renew(gang, rank, party_get(gang, rank))
    end
  else
    waits = ranks_missing(gang, world)
    -- Once, and only of a round that a rank has waited in for a while: each hold of a gang forms for a moment.
    if party and party.id == id and redis.call('HEXISTS', waiters_key, gang .. '/told') == 0 then
      redis.call('HSET', waiters_key, gang .. '/told', '1')
      emit('GangForming', 'job', job, 'waiter', gang, 'rank', rank, 'arrived', digits(arrived),
        'world', ARGV[6], 'missing', waits)
    end
    advance()
  end
end
save()
local told = answer(gang, job, host, pid, start)
if waits ~= '' then
  told[5] = waits
end
told[#told + 1] = gang
if S.lease_id == gang then
  told[#told + 1] = ranks_unconfirmed(gang)
end
return told
