-- Gangs: the ranks of one program, which wait and hold as one. Needs group, waiters.
-- In the waiters hash beside the gang's own record: `<gang>/party/<rank>` -> "id host pid start renewed", where renewed
-- is when that rank last renewed by itself ('-': not yet, 'left': it gave the lease up); `<gang>/arrived`, `<gang>/left`,
-- `<gang>/confirmed` (how many ranks have renewed: no body runs before all have), `<gang>/failed` (a rank left a weight
-- sync with an error), `<gang>/score`, `<gang>/told` and, of one that holds, `<gang>/called` (its name); `<id>/gang` ->
-- "gang rank"; `@<name>` -> the round that forms.
-- In alive: `<gang>/<rank>` -> that rank's own deadline. Whoever passes it ends the gang for all.
local NAMED_MAX = 8
local UNKNOWN = '?' -- who a rank is, as long as it has not come back after data loss

-- A rank as it stands in names, without a sign or zeros before it.
local function is_rank(rank, world)
  local last = tonumber(world)
  return string.match(world, '^[1-9]%d*$') and last <= WORLD_MAX and string.match(rank, '^%d+$')
    and tonumber(rank) < last and rank == tostring(tonumber(rank))
end

local function party_get(gang, rank)
  local text = redis.call('HGET', waiters_key, gang .. '/party/' .. rank)
  local id, host, pid, start, renewed = string.match(text or '', '^(%S+) (%S+) (%S+) (%S+) (%S+)$')
  return id and { id = id, host = host, pid = pid, start = start, renewed = renewed }
end

local function party_set(gang, rank, party)
  redis.call('HSET', waiters_key, gang .. '/party/' .. rank,
    party.id .. ' ' .. party.host .. ' ' .. party.pid .. ' ' .. party.start .. ' ' .. party.renewed)
end

-- How many ranks of the gang that holds have not confirmed yet that they know of it.
local function ranks_unconfirmed(gang)
  return math.max(world_of(S.gang) - (tonumber(redis.call('HGET', waiters_key, gang .. '/confirmed')) or 0), 0)
end

-- A rank that is inside, or on its way in, gives a sign of life. The last one to confirm lets all bodies begin.
local function party_renew(gang, rank, party)
  if party.renewed == '-' and redis.call('HINCRBY', waiters_key, gang .. '/confirmed', 1) == world_of(S.gang) then
    redis.call('XADD', grant_prefix .. gang, '*', 'kind', 'all')
  end
  party.renewed = digits(now)
  party_set(gang, rank, party)
  redis.call('ZADD', alive_key, now + S.lease_ms, gang .. '/' .. rank)
end

-- Takes a rank out of the lease, as `yielded` by itself or not; true if it was the last one inside.
local function party_leave(gang, rank, yielded)
  local party = party_get(gang, rank)
  if not party or party.renewed == 'left' then
    return false
  end
  party.renewed = 'left'
  party_set(gang, rank, party)
  redis.call('ZREM', alive_key, gang .. '/' .. rank)
  if yielded then
    remember_ended(gang .. '/' .. rank)
  end
  if party.id ~= UNKNOWN then
    remember_ended(party.id) -- a late repeat of its join must not begin a new round
  end
  return redis.call('HINCRBY', waiters_key, gang .. '/left', 1) >= world_of(S.gang)
end

-- A rank for people.
local function party_named(gang, rank)
  local party = party_get(gang, rank)
  if not party or party.host == '-' then
    return 'rank ' .. rank
  end
  return 'rank ' .. rank .. ' (process ' .. party.pid .. ' on node ' .. party.host .. ')'
end

-- The gang and rank of an entry in alive, or nil: it is a waiter's own.
local function party_alive(member)
  return string.match(member, '^([^/]+)/(%d+)$')
end

-- Which ranks of a round have not arrived, for people.
local function ranks_missing(gang, world)
  local fields, names, missing = {}, {}, 0
  for rank = 0, world - 1 do
    fields[rank + 1] = gang .. '/party/' .. rank
  end
  for i, party in ipairs(redis.call('HMGET', waiters_key, unpack(fields))) do
    if not party then
      missing = missing + 1
      if missing <= NAMED_MAX then
        names[missing] = tostring(i - 1)
      end
    end
  end
  local more = missing > NAMED_MAX and ' and ' .. (missing - NAMED_MAX) .. ' more' or ''
  return (missing == 1 and 'rank ' or 'ranks ') .. table.concat(names, ', ') .. more .. ' of ' .. world
    .. (missing == 1 and ' has' or ' have') .. ' not arrived'
end

-- Where the round that forms is found by those who arrive.
local function forming_field(name, job, world)
  return '@' .. name .. '.' .. job .. '.' .. world
end

-- Takes a round out of its forming: it is complete, or over.
local function gang_formed(gang, name, job, world)
  local field = forming_field(name, job, world)
  if redis.call('HGET', waiters_key, field) == gang then
    redis.call('HDEL', waiters_key, field)
  end
end

-- Forgets the ranks. Who had not left is remembered: a call of its own may be under way, and must not begin a new round.
local function gang_forget(gang, world)
  for rank = 0, world - 1 do
    local party = party_get(gang, rank)
    if party then
      if party.renewed ~= 'left' and party.id ~= UNKNOWN then
        remember_ended(party.id)
      end
      redis.call('HDEL', waiters_key, gang .. '/party/' .. rank, party.id .. '/gang')
      redis.call('ZREM', alive_key, gang .. '/' .. rank)
    end
  end
  redis.call('HDEL', waiters_key, gang .. '/arrived', gang .. '/left', gang .. '/confirmed', gang .. '/score',
    gang .. '/told', gang .. '/failed', gang .. '/called')
end

-- All ranks read why their gang is over; who asks or renews later is told so, too.
local function gang_tell(gang, why)
  local key = grant_prefix .. gang
  redis.call('XADD', key, 'MAXLEN', 8, '*', 'kind', 'ended', 'reason', why)
  redis.call('EXPIRE', key, GRANT_KEEP_S)
  remember_ended(gang)
end

local TWO_PROGRAMS = 'if these are two programs with one job id, give each its own TIMESLICE_JOB, or its ranks a '
  .. 'MASTER_ADDR and MASTER_PORT that no other has'

-- Two living processes that ask as one rank are two programs under one name, whose ranks would complete each other's
-- rounds. One that comes while another process is inside as its rank may be that one started again. It is a second one
-- if the one inside asks once more. Marks beside the ids that ended say so: `first/`, `second/` and a process.
local function twin_mark(kind, forming, rank, process)
  return kind .. '/' .. forming .. '/' .. rank .. '/' .. process.host .. '/' .. process.pid .. '/' .. process.start
end

-- Why a process can't be this rank, or nil. Asked at each of its calls, so that marks last as long as the doubt.
local function twin(forming, name, job, world, rank, process)
  local both = 'both/' .. forming .. '/' .. rank
  local first, second = twin_mark('first', forming, rank, process), twin_mark('second', forming, rank, process)
  local other = S.gang == world and S.job == job and redis.call('HGET', waiters_key, S.lease_id .. '/called') == name
    and party_get(S.lease_id, rank)
  if other and other.renewed ~= 'left' and other.id ~= UNKNOWN
    and not (other.host == process.host and other.pid == process.pid and other.start == process.start) then
    if has_ended(twin_mark('second', forming, rank, other)) then
      remember_ended(twin_mark('second', forming, rank, other)) -- and who it came to is not second to it
    else
      remember_ended(second)
      remember_ended(twin_mark('first', forming, rank, other))
    end
  end
  if has_ended(first) then
    remember_ended(first)
    remember_ended(both)
  elseif has_ended(second) and has_ended(both) then
    remember_ended(second)
    remember_ended(both)
    return 'another living process is rank ' .. rank .. ' of ' .. world .. ', too; ' .. TWO_PROGRAMS
  end
end

-- Takes a waiter out for good, be it a gang or not.
local function waiter_drop(waiter)
  local record = redis.call('HMGET', waiters_key, waiter .. '/world', waiter .. '/name', waiter .. '/job')
  if record[1] then
    gang_formed(waiter, record[2] or '', record[3] or '', record[1])
    gang_forget(waiter, world_of(record[1]))
  end
  waiter_remove(waiter)
end
